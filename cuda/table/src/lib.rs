//! Lists all functions in the CUDA driver API with their classes, and the names of NVML's functions.
//!
//! The names and versions are from the headers of CUDA 12.9 and 13.5 (`cuda.h`, `cudaGL.h`, `cudaEGL.h`, `cudaVDPAU.h`
//! and their `Typedefs`). A function has *forms*: symbols for the versions of its signature (`_v2`) and for the
//! per-thread default stream (`_ptds`, `_ptsz`). `cuGetProcAddress` selects a form by the version and flags that the
//! caller passes.
//!
//! This crate does not contain signatures, types or code. `cuda-driver` contains them for the functions that it calls.

#![forbid(unsafe_code)]

mod headers;
mod names;
mod nvml;

pub use headers::{declared, declared_of_nvml};
pub use nvml::NVML;

/// Class of a function, which indicates effects that are relevant to a mediator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Allocates card memory for the program.
    Allocate,
    /// Arrays, whose layout only the driver knows.
    Array,
    /// Stream captures, and related functions.
    Capture,
    /// Contexts, and the partitions of a card that they are bound to.
    Context,
    /// Submits copies, fills or prefetches.
    Copy,
    /// Properties of cards.
    Device,
    /// Events.
    Event,
    /// Frees card memory.
    Free,
    /// Builds, edits and instantiates graphs.
    Graph,
    /// Pinned host memory.
    Host,
    /// Reports memory sizes.
    Information,
    /// Initialization, errors, and function lookup.
    Init,
    /// Memory and semaphores of other interfaces.
    Interop,
    /// Code modules and their functions.
    Module,
    /// Properties of addresses.
    Pointer,
    /// Stream-ordered memory managed by the driver.
    Pool,
    /// Memory that other processes or cards can access.
    Share,
    /// Streams.
    Stream,
    /// Submits work other than copies.
    Submit,
    /// Views of memory for texture units and tensor copies.
    Texture,
    /// Profilers, core dumps, checkpoints, and logs.
    Tool,
    /// Address ranges and physical memory that the program manages itself.
    Virtual,
}

/// A symbol of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Version of the driver that introduced the form, encoded as 1000 times the major version plus 10 times the minor
    /// version, or 0 if unknown.
    pub version: u32,
    /// Suffix of the symbol.
    pub suffix: &'static str,
    /// Major version of the oldest header that declares the symbol: 12 or 13.
    pub header: u8,
}

impl Form {
    /// Returns true if calls of this form use the per-thread default stream as the default stream.
    pub fn per_thread(&self) -> bool {
        self.suffix.ends_with("_ptsz") || self.suffix.ends_with("_ptds")
    }
}

/// A function and all its symbols. Plain symbols precede per-thread symbols, and the symbols of each kind are ordered
/// by version.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Name without suffixes.
    pub name: &'static str,
    forms: &'static [(u32, &'static str, u8)],
}

const fn family(name: &'static str, forms: &'static [(u32, &'static str, u8)]) -> Family {
    Family { name, forms }
}

impl Family {
    /// Returns the function's symbols.
    pub fn forms(&self) -> impl Iterator<Item = Form> + use<> {
        self.forms.iter().map(|&(version, suffix, header)| Form { version, suffix, header })
    }

    /// Returns the form that `cuGetProcAddress` finds for `version`: the newest form up to that version. If
    /// `per_thread` is true, the per-thread forms take precedence, if any exist.
    pub fn form(&self, version: u32, per_thread: bool) -> Option<Form> {
        let newest = |kind: bool| self.forms().filter(|f| f.per_thread() == kind && f.version <= version).last();
        per_thread.then(|| newest(true)).flatten().or_else(|| newest(false))
    }
}

/// Returns every function with its class.
pub fn families() -> impl Iterator<Item = (Class, &'static Family)> {
    names::CLASSES.iter().flat_map(|(class, families)| families.iter().map(move |family| (*class, family)))
}

/// Returns every symbol with its class, in the order of [`families`].
pub fn symbols() -> impl Iterator<Item = (String, Class, Form)> {
    families()
        .flat_map(|(class, family)| family.forms().map(move |f| (format!("{}{}", family.name, f.suffix), class, f)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn family(name: &str) -> &'static Family {
        families().find(|(_, f)| f.name == name).expect("a function of the API").1
    }

    #[test]
    fn symbol_names_are_unique() {
        let names: Vec<_> = symbols().map(|(name, ..)| name).collect();
        let distinct: BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), distinct.len());
        assert!(names.len() > 700, "{}", names.len());
    }

    #[test]
    fn versions_and_flags_choose_a_form() {
        let copy = family("cuMemcpyHtoDAsync");
        let suffix = |version, thread| copy.form(version, thread).map(|f| f.suffix);
        assert_eq!(suffix(2000, false), Some(""));
        assert_eq!(suffix(3010, false), Some(""));
        assert_eq!(suffix(3020, false), Some("_v2"));
        assert_eq!(suffix(13_000, true), Some("_v2_ptsz"));
        assert_eq!(suffix(3020, true), Some("_v2"), "no per-thread form is that old");
        assert_eq!(family("cuMemAlloc").form(12_000, true).map(|f| f.suffix), Some("_v2"));
    }

    #[test]
    fn forms_are_in_the_order_of_versions() {
        for (_, family) in families() {
            for kind in [false, true] {
                let versions: Vec<_> = family.forms().filter(|f| f.per_thread() == kind).map(|f| f.version).collect();
                assert!(versions.is_sorted(), "{}: {versions:?}", family.name);
            }
        }
    }
}
