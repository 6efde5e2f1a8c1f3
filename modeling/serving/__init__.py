"""Serving engines: how their paged caches keep composition factors, and what links the models to them."""
