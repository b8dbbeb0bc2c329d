"""The decode loop and the requests in it."""
