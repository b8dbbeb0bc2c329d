"""The field's protocol: question sets, what is measured on them, its record, and the report of it."""
