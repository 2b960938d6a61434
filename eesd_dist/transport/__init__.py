"""Communication between ranks. Every wait has a deadline, and its error names the peer."""
