"""A report: one HTML page about one run or several, made from their traces.

``RunReader`` follows a trace and keeps sums that do not grow with time; ``run_of`` makes of them what a page
shows of one run, ``findings_of`` the sentences about what cost most, and ``write_page`` the file.
"""
