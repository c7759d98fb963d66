"""Linear attention: layers whose state is a matrix per head, of a size that does not depend on the request's length."""
