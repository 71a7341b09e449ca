"""The page of a run, or of several beside each other, as a file. Pure: loads no torch.

The way of the data::

    folders -> run directories -> RecordedRun of each -> RunView: curves, marks, figures
                                                      -> what differs between them
            -> one page, report.html
"""
