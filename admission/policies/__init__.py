"""Admission policies by name. A new one is a file here and a line in the table; `admission.policies.rule.Rule` is the contract."""

from __future__ import annotations

from admission.policies.choice import AdmissionChoice
from admission.policies.fcfs import FcfsParameters, fcfs
from admission.policies.kv_budget import KvBudgetParameters, kv_budget
from admission.policies.prefix_first import PrefixFirstParameters, prefix_first
from admission.policies.working_set import WorkingSetParameters, working_set

ADMISSION_POLICIES: dict[str, AdmissionChoice] = {
    "fcfs": AdmissionChoice(FcfsParameters, fcfs),
    "kv_budget": AdmissionChoice(KvBudgetParameters, kv_budget),
    "prefix_first": AdmissionChoice(PrefixFirstParameters, prefix_first),
    "working_set": AdmissionChoice(WorkingSetParameters, working_set),
}
