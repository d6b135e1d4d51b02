//! Stores prepared claims in a file, so that they survive a restart of the driver or the node.
//!
//! A claim is recorded before its shares are created, and deleted after they are removed. All existing shares are
//! therefore known, even after a crash.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::share::Body;

/// Version of the file.
const VERSION: u32 = 1;
/// Maximum size of the file in bytes.
const MAX_FILE: u64 = 16 << 20;

/// A claim's share of one or more cards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptShare {
    /// The daemon request for the tenant or virtual machine.
    pub body: Body,
    /// The request for which the device was prepared.
    pub request: String,
    /// The pool from which the device was allocated.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Identifier of the allocation. Set if a device can have several allocations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Further devices of a tenant with several cards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<KeptDevice>,
}

/// A further device of a share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptDevice {
    /// Name of the device, from the same pool and for the same request.
    pub device: String,
    /// Identifier of the allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
}

/// A claim that is prepared or in preparation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptClaim {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Set if all shares have been created.
    pub prepared: bool,
    /// Shares of the claim.
    pub shares: Vec<KeptShare>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    claims: BTreeMap<String, KeptClaim>,
}

/// Reason why the claims file cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum StoreError {
    #[error("{} cannot be read or written", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} is not a list of prepared claims: {what}; move it away, and remove the tenants and VMs whose names begin with `k8s-` that \
         no pod uses",
        path.display()
    )]
    Content { path: PathBuf, what: String },
}

/// The claims and their file.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    claims: BTreeMap<String, KeptClaim>,
}

impl Store {
    /// Loads the file if it exists.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is invalid. The driver must then exit, because it would otherwise
    /// lose prepared claims.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Io { path: path.to_owned(), source };
        let wrong = |what: String| StoreError::Content { path: path.to_owned(), what };
        match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self { path: path.to_owned(), claims: BTreeMap::new() });
            }
            Err(error) => return Err(failed(error)),
            Ok(there) if there.len() > MAX_FILE => return Err(wrong(format!("{} bytes", there.len()))),
            Ok(_) => {}
        }
        let text = std::fs::read(path).map_err(failed)?;
        // Check the version first, because another version may have different fields.
        let any: serde_json::Value = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if any["version"] != VERSION {
            return Err(wrong(format!("version {}, expected {VERSION}", any["version"])));
        }
        let File { claims, .. } = serde_json::from_value(any).map_err(|error| wrong(error.to_string()))?;
        Ok(Self { path: path.to_owned(), claims })
    }

    /// Returns the claims, keyed by UID.
    #[must_use]
    pub fn claims(&self) -> &BTreeMap<String, KeptClaim> {
        &self.claims
    }

    /// Returns the claim with the given UID, if it is recorded.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<&KeptClaim> {
        self.claims.get(uid)
    }

    /// Adds or replaces a claim.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The claims are then unchanged.
    pub fn put(&mut self, uid: &str, claim: KeptClaim) -> Result<(), StoreError> {
        let mut claims = self.claims.clone();
        claims.insert(uid.to_owned(), claim);
        self.keep(claims)
    }

    /// Deletes a claim.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The claims are then unchanged.
    pub fn forget(&mut self, uid: &str) -> Result<(), StoreError> {
        let mut claims = self.claims.clone();
        if claims.remove(uid).is_none() {
            return Ok(());
        }
        self.keep(claims)
    }

    fn keep(&mut self, claims: BTreeMap<String, KeptClaim>) -> Result<(), StoreError> {
        let failed = |source| StoreError::Io { path: self.path.clone(), source };
        let file = File { version: VERSION, claims };
        let text = serde_json::to_vec(&file).map_err(|error| failed(error.into()))?;
        cdi_spec::replace(&self.path, &text, 0o600).map_err(failed)?;
        self.claims = file.claims;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(name: &str) -> KeptClaim {
        let spec = api::AddVm::new("k8s-u-0", "card0", 16);
        let share = KeptShare {
            body: Body::Vm(Box::new(spec)),
            request: "gpu".to_owned(),
            pool: "node".to_owned(),
            device: "card0".to_owned(),
            share_id: Some("s".to_owned()),
            others: vec![KeptDevice { device: "card1".to_owned(), share_id: None }],
        };
        KeptClaim { namespace: "prod".to_owned(), name: name.to_owned(), prepared: true, shares: vec![share] }
    }

    #[test]
    fn claims_outlive_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state").join("claims.json");
        let mut store = Store::open(&path).unwrap();
        store.put("u", claim("a")).unwrap();
        store.put("v", claim("b")).unwrap();
        store.forget("u").unwrap();
        store.forget("u").unwrap();
        let again = Store::open(&path).unwrap();
        assert_eq!(again.claims().keys().collect::<Vec<_>>(), ["v"]);
        assert_eq!(again.get("v"), Some(&claim("b")));
    }

    #[test]
    fn a_file_that_cannot_be_written_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file").join("claims.json");
        std::fs::write(folder.path().join("file"), "no folder").unwrap();
        let mut store = Store { path, claims: BTreeMap::from([("u".to_owned(), claim("a"))]) };
        assert!(store.put("v", claim("b")).is_err() && store.forget("u").is_err());
        assert_eq!(store.claims().len(), 1);
    }

    #[test]
    fn invalid_store_file_is_rejected_with_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("claims.json");
        for text in ["", "junk", "{}", r#"{"version":2,"claims":{}}"#, r#"{"version":1,"claims":{"u":{}}}"#] {
            std::fs::write(&path, text).unwrap();
            let error = Store::open(&path).unwrap_err().to_string();
            assert!(error.contains("move it away"), "{text}: {error}");
        }
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(MAX_FILE + 1).unwrap();
        assert!(Store::open(&path).is_err());
    }
}
