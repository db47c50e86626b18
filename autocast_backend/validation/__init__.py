"""Translation validation: does a lowered call do what autocast does? Each asked once."""
