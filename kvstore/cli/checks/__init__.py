"""What `kvstore doctor` looks at; doctor.py runs and shows it."""
