//! Finds the names declared in a header.

use std::collections::BTreeSet;

/// Returns the names of the functions declared in a header, and of the symbols that its macros substitute.
pub fn declared(header: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in header.match_indices("CUDAAPI cu") {
        let name = word(&header[at + "CUDAAPI ".len()..]);
        if header[at + "CUDAAPI ".len() + name.len()..].trim_start().starts_with('(') {
            names.insert(name.to_owned());
        }
    }
    for line in header.lines() {
        let Some(macro_text) = line.trim_start().strip_prefix('#').map(str::trim_start) else { continue };
        let mut words = macro_text.split_whitespace();
        if words.next() != Some("define") || !words.next().is_some_and(|name| name.starts_with("cu")) {
            continue;
        }
        let value = words.next().unwrap_or_default();
        for (wrapper, suffix) in [("__CUDA_API_PTDS(", "_ptds"), ("__CUDA_API_PTSZ(", "_ptsz")] {
            if let Some(inner) = value.strip_prefix(wrapper) {
                names.insert(word(inner).to_owned());
                names.insert(format!("{}{suffix}", word(inner)));
            }
        }
        if value.starts_with("cu") && word(value) == value {
            names.insert(value.to_owned());
        }
    }
    names
}

/// Returns the names of the functions declared in NVML's header.
pub fn declared_of_nvml(header: &str) -> BTreeSet<String> {
    let lines = header.lines().filter(|line| line.contains("DECLDIR ") && !line.trim_start().starts_with('#'));
    let name = |line: &str| {
        let (before, _) = line.split_once('(')?;
        before.split_whitespace().next_back().filter(|name| name.starts_with("nvml")).map(str::to_owned)
    };
    lines.filter_map(name).collect()
}

fn word(text: &str) -> &str {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::symbols;

    #[test]
    fn declarations_and_macros_are_found() {
        let text = "#define cuA __CUDA_API_PTSZ(cuA_v2)\n  #define cuB   cuB_v3\nCUresult CUDAAPI cuA(int);\n\
                    CUresult CUDAAPI cuB (int);\ntypedef void (CUDA_CB *CUhostFn)(void *);\n";
        let names: Vec<_> = declared(text).into_iter().collect();
        assert_eq!(names, ["cuA", "cuA_v2", "cuA_v2_ptsz", "cuB", "cuB_v3"]);
    }

    /// Checks the headers of both versions, which `cargo xtask test --suite cuda` fetches.
    #[test]
    #[cfg_attr(not(feature = "headers"), ignore = "needs NVIDIA's headers: cargo xtask test --suite cuda")]
    fn every_declared_function_has_a_class() {
        let folder = std::env::var("GPU_MEDIATOR_CUDA_HEADERS").expect("GPU_MEDIATOR_CUDA_HEADERS names a folder");
        let known: BTreeMap<_, _> = symbols().map(|(name, class, form)| (name, (class, form.header))).collect();
        for version in [12, 13] {
            let mut names = BTreeSet::new();
            for header in ["cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h"] {
                let path = format!("{folder}/{version}/{header}");
                names.extend(declared(&std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))));
            }
            assert!(names.len() > 600, "{version}: found only {} names", names.len());
            let missing: Vec<_> = names.iter().filter(|n| !known.contains_key(*n)).collect();
            assert!(missing.is_empty(), "functions of CUDA {version} without a class: {missing:?}");
            let late: Vec<_> = names.iter().filter(|n| known.get(*n).is_some_and(|k| k.1 > version)).collect();
            assert!(late.is_empty(), "functions that CUDA {version} already has: {late:?}");
        }
    }
}
