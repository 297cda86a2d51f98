"""Bodies of requests and answers, as OpenAI's clients write and read them."""
