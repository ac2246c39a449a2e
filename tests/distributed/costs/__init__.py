"""What a step costs, counted: bytes, calls, memory."""
