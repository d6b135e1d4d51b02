//! A claim's namespace, name and UID.

/// Maximum length of a claim's UID in bytes. The UID is part of the names of tenants and virtual machines.
const MAX_UID: usize = 48;

/// A claim named in the kubelet's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim.
    pub uid: String,
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "claim {}/{} ({})", self.namespace, self.name, self.uid)
    }
}

impl Named {
    /// Checks the UID, which is used in paths and names.
    pub(crate) fn check(&self) -> Result<(), String> {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let ends = self.uid.bytes().next().zip(self.uid.bytes().last());
        let ends = ends.is_some_and(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric());
        if ends && self.uid.len() <= MAX_UID && self.uid.bytes().all(good) {
            return Ok(());
        }
        let shown: String = self.uid.chars().take(MAX_UID).collect();
        Err(format!("{shown:?} is not a UID, expected up to {MAX_UID} letters, digits and `-`"))
    }
}
