"""Checks what `kvstore doctor` looks at; doctor.py runs them and shows what they found."""
