"""The page of a run, or of several beside each other, as a file or served while they train. Pure: loads no torch.

The way of the data::

    folders -> run directories -> RecordedRun of each -> RunView: curves, marks, figures
                                                      -> what differs between them
            -> one page, which is written as report.html, or served again and again by det-ds watch --page
"""
