"""Checks that a user can run: does this model decode trees exactly, and would the check notice if it did not?"""

from treepass.audit.model import Check, ModelAudit, audit_model
from treepass.audit.mutants import MUTANTS, Mutant

__all__ = ["MUTANTS", "Check", "ModelAudit", "Mutant", "audit_model"]
