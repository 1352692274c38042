"""Reports people can edit and send: Markdown, and one HTML file that opens offline."""

from hicache_lab.views.report.document import Document, write_report
from hicache_lab.views.report.postmortem import Postmortem, postmortem
from hicache_lab.views.report.runs import run_report
from hicache_lab.views.report.sections import to_document

__all__ = ["Document", "Postmortem", "postmortem", "run_report", "to_document", "write_report"]
