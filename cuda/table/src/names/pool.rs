//! Functions for stream-ordered memory managed by the driver.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuDeviceGetDefaultMemPool", &[(11020, "", 12)]),
    family("cuDeviceGetGraphMemAttribute", &[(11040, "", 12)]),
    family("cuDeviceGetMemPool", &[(11020, "", 12)]),
    family("cuDeviceGraphMemTrim", &[(11040, "", 12)]),
    family("cuDeviceSetGraphMemAttribute", &[(11040, "", 12)]),
    family("cuDeviceSetMemPool", &[(11020, "", 12)]),
    family("cuMemGetDefaultMemPool", &[(13000, "", 13)]),
    family("cuMemGetMemPool", &[(13000, "", 13)]),
    family("cuMemPoolCreate", &[(11020, "", 12)]),
    family("cuMemPoolDestroy", &[(11020, "", 12)]),
    family("cuMemPoolGetAccess", &[(11020, "", 12)]),
    family("cuMemPoolGetAttribute", &[(11020, "", 12)]),
    family("cuMemPoolSetAccess", &[(11020, "", 12)]),
    family("cuMemPoolSetAttribute", &[(11020, "", 12)]),
    family("cuMemPoolTrimTo", &[(11020, "", 12)]),
    family("cuMemSetMemPool", &[(13000, "", 13)]),
];
