"""What the compiler did to a graph: in numbers, call by call, as a page."""
