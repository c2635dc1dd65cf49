"""Tests of structured outputs."""
