//! Functions for arrays, whose layout is known only to the driver.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuArray3DCreate", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuArray3DGetDescriptor", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuArrayCreate", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuArrayDestroy", &[(2000, "", 12)]),
    family("cuArrayGetDescriptor", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuArrayGetMemoryRequirements", &[(11060, "", 12)]),
    family("cuArrayGetPlane", &[(11020, "", 12)]),
    family("cuArrayGetSparseProperties", &[(11010, "", 12)]),
    family("cuMipmappedArrayCreate", &[(5000, "", 12)]),
    family("cuMipmappedArrayDestroy", &[(5000, "", 12)]),
    family("cuMipmappedArrayGetLevel", &[(5000, "", 12)]),
    family("cuMipmappedArrayGetMemoryRequirements", &[(11060, "", 12)]),
    family("cuMipmappedArrayGetSparseProperties", &[(11010, "", 12)]),
];
