"""What autocast does to which op, and what a user asks for instead."""
