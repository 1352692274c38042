"""What people look at: figures, tables, widgets and reports."""
