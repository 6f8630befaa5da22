"""Jinja templates of everything that onboarding writes."""
