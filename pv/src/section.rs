//! Descriptions of the interface's constants and structures, for its C header.

/// Description of a constant.
pub(crate) struct Constant {
    pub(crate) name: &'static str,
    pub(crate) value: u64,
    /// Size of the constant's type in bytes.
    pub(crate) bytes: usize,
    pub(crate) doc: &'static [&'static str],
}

/// The constants of a module, or the variants of an enumeration.
pub(crate) struct Section {
    pub(crate) path: &'static str,
    pub(crate) doc: &'static [&'static str],
    pub(crate) constants: &'static [Constant],
}

/// Description of a structure.
pub(crate) struct Structure {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    pub(crate) doc: &'static [&'static str],
    pub(crate) fields: &'static [Field],
}

/// Description of a structure field.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) ty: &'static str,
    pub(crate) doc: &'static [&'static str],
}
