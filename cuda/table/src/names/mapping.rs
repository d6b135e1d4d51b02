//! Functions for address ranges and physical memory that the program manages.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuMemAddressFree", &[(10020, "", 12)]),
    family("cuMemAddressReserve", &[(10020, "", 12)]),
    family("cuMemCreate", &[(10020, "", 12)]),
    family("cuMemGetAccess", &[(10020, "", 12)]),
    family("cuMemGetAllocationGranularity", &[(10020, "", 12)]),
    family("cuMemGetAllocationPropertiesFromHandle", &[(10020, "", 12)]),
    family("cuMemMap", &[(10020, "", 12)]),
    family("cuMemMapArrayAsync", &[(11010, "", 12), (11010, "_ptsz", 12)]),
    family("cuMemRelease", &[(10020, "", 12)]),
    family("cuMemRetainAllocationHandle", &[(11000, "", 12)]),
    family("cuMemSetAccess", &[(10020, "", 12)]),
    family("cuMemUnmap", &[(10020, "", 12)]),
];
