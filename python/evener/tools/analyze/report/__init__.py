"""A picture and its findings as JSON, as text for a terminal, and as one HTML file."""

from evener.tools.analyze.report.document import document
from evener.tools.analyze.report.page import page
from evener.tools.analyze.report.terminal import terminal

__all__ = ["document", "page", "terminal"]
