//! Functions that return or set properties of addresses.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuMemAdvise", &[(8000, "", 12), (12020, "_v2", 12)]),
    family("cuMemGetAddressRange", &[(2000, "", 12), (3020, "_v2", 12)]),
    // Exported by driver 580, but not declared in any header.
    family("cuMemGetAttribute", &[(0, "", 12), (0, "_v2", 12)]),
    family("cuMemGetLocationInfo", &[(13040, "", 13)]),
    family("cuMemRangeGetAttribute", &[(8000, "", 12)]),
    family("cuMemRangeGetAttributes", &[(8000, "", 12)]),
    family("cuPointerGetAttribute", &[(4000, "", 12)]),
    family("cuPointerGetAttributes", &[(7000, "", 12)]),
    family("cuPointerSetAttribute", &[(6000, "", 12)]),
];
