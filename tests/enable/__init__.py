"""enable: models of libraries, and modules of a user's own, compute enabled what they compute stock."""
