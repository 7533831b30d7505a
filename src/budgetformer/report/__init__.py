"""Report: tables, figures and pictures, drawn from numbers that were measured elsewhere."""

from budgetformer.report.tables import cells, draw_figures, markdown_table, notes, table, write_report

__all__ = ["cells", "draw_figures", "markdown_table", "notes", "table", "write_report"]
