"""Training of learned drafters: data, the target's hidden states, the modules that learn, and the loop."""
