"""An OpenAI-compatible HTTP server over the engine: FastAPI for the routes, one thread that runs rounds."""
