"""Types, configuration, errors, sampling and noise: what every other package stands on."""
