"""Admission policies by name. A new one is a file here and a line in the table; `admission.requests.AdmissionPolicy` is the contract."""

from __future__ import annotations

from collections.abc import Callable

from admission.policies.fcfs import FirstComeFirstServed
from admission.requests import AdmissionPolicy, Limits
from admission.tickets import TicketBook

ADMISSION_POLICIES: dict[str, Callable[[TicketBook, Limits], AdmissionPolicy]] = {
    "fcfs": FirstComeFirstServed,
}
