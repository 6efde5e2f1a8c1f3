"""How a model knows where its tokens stand."""
