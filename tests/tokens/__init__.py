"""Tests of recycle.tokens."""
