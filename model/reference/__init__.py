"""MiniMax-M3's layers in plain PyTorch: slow, exact, and what every fast path is compared with. Needs torch."""
