"""Decides which pipeline serves a request, and keeps the pooled beliefs."""
