"""Moving data: views, copies, conversions, single instructions."""
