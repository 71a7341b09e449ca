"""The classes that a model author subclasses: Determined's ``DeepSpeedTrial`` with the wiring done."""
