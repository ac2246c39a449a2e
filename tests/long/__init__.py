"""Whether anything grows: over many steps of one model, and over many models of one process."""
