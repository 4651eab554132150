"""What is true about MiniMax-M3: sizes, local shapes, bytes that persist and bytes that move. No torch."""
