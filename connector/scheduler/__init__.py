"""The scheduler side: lookups, decisions of a step, what requests hold, why they did not hit."""
