"""A picture and its findings as JSON, as text for a terminal, and as one HTML file."""

from evener.analyze.report.document import document
from evener.analyze.report.page import page
from evener.analyze.report.terminal import terminal

__all__ = ["document", "page", "terminal"]
