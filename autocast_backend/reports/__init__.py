"""What the compiler did, for logs, pages and people."""
