"""Several drafters as one: their trees united, each judged by what came true of its claims."""
