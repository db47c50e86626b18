"""The backward pass: compiled for whatever autocast state it really runs in."""
