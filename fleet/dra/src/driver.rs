//! Prepares and unprepares claims.
//!
//! Both operations are idempotent, because a kubelet may repeat them after a lost response or a restart. Preparing a
//! claim keeps existing shares and creates missing ones.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use admin_client::{Admin, AskError, segment, sockets};
use api::ErrorCode;
use cdi_spec::{CdiFile, Cuda, Device, Edits, Mount, Vgpu};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::{Api, Client};
use tokio::sync::{Mutex, watch};

use crate::DRIVER;
use crate::claim::Named;
use crate::device::{Offer, Trouble};
use crate::events::{Event, Events};
use crate::metrics::Metrics;
use crate::parameters::applied;
use crate::share::{self, Body, Claim};
use crate::store::{KeptClaim, KeptDevice, KeptShare, Store};

/// Maximum number of shares of a claim.
const MAX_SHARES: usize = 32;
/// Time limit of a request to the API server.
// TIMEOUT: the kubelet waits 45 s for the whole request.
const KUBE: Duration = Duration::from_secs(15);

/// The driver's paths and names.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the node and of its device pool.
    pub node: String,
    /// Parent folder of the socket folders.
    pub sockets: PathBuf,
    /// Folder of CDI files.
    pub cdi: PathBuf,
    /// The daemon's admin socket.
    pub admin: PathBuf,
    /// Folder of gpu-mediator's CUDA library.
    pub library: PathBuf,
    /// Path of NVIDIA's `libcuda.so.1` on the host.
    pub driver_library: Option<PathBuf>,
    /// CDI devices, such as NVIDIA's own, that a container gets in addition to a tenant's devices.
    pub beside: Vec<String>,
}

/// A prepared device, as reported to the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The request for which the device was prepared.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// IDs of the CDI devices.
    pub cdi: Vec<String>,
}

/// Prepares and unprepares a node's claims.
pub struct Driver {
    settings: Settings,
    admin: Admin,
    kube: Client,
    offers: watch::Receiver<Vec<Offer>>,
    store: Mutex<Store>,
    events: Events,
    metrics: Arc<Metrics>,
}

/// Owner of the tenant or virtual machine with a share's name, if it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum There {
    Nothing,
    Ours,
    Others,
}

/// Returns the message for a failed request to the daemon.
fn told(error: &AskError) -> String {
    match error {
        AskError::Refused(error) => format!("{}; {}", error.error, error.what_to_do),
        other => match std::error::Error::source(other) {
            Some(source) => format!("{other}: {source}"),
            None => other.to_string(),
        },
    }
}

fn is_gone(error: &AskError) -> bool {
    matches!(error, AskError::Refused(error) if error.code == ErrorCode::NotFound)
}

impl Driver {
    /// Creates a driver with the daemon's `offers` and the claims in `store`.
    #[must_use]
    pub fn new(
        settings: Settings,
        kube: Client,
        offers: watch::Receiver<Vec<Offer>>,
        store: Store,
        metrics: Arc<Metrics>,
    ) -> Self {
        let admin = Admin::new(settings.admin.clone());
        let events = Events::new(kube.clone(), &settings.node);
        metrics.claims(store.claims());
        Self { settings, admin, kube, offers, store: Mutex::new(store), events, metrics }
    }

    /// Prepares a claim.
    ///
    /// # Errors
    /// Returns an error if the claim cannot be prepared. The message appears in the events of the claim's pod. If the
    /// preparation of a new claim fails, its shares are removed.
    pub async fn prepare(&self, claim: &Named) -> Result<Vec<Prepared>, String> {
        let mut store = self.store.lock().await;
        let done = self.prepare_with(&mut store, claim).await;
        self.metrics.prepared(done.is_ok());
        self.metrics.claims(store.claims());
        match &done {
            Ok((_, false)) => {}
            Ok((kept, true)) => {
                let names: Vec<_> = kept.shares.iter().map(|share| share.body.name()).collect();
                tracing::info!(%claim, shares = names.join(" "), "prepared");
                let pods = kept.shares.first().and_then(|share| pods(share.body.labels()));
                self.events.tell(Event::prepared(claim, pods, &names.join(", ")));
            }
            Err(what) => {
                tracing::warn!(%claim, what, "not prepared");
                self.events.tell(Event::failed(claim, what));
            }
        }
        done.map(|(kept, _)| self.prepared(&claim.uid, &kept))
    }

    /// Prepares a claim. Returns the claim, and a flag that is true if it was not prepared before.
    async fn prepare_with(&self, store: &mut Store, claim: &Named) -> Result<(KeptClaim, bool), String> {
        claim.check()?;
        let there = store.get(&claim.uid).cloned();
        let (mut kept, known) = match there {
            Some(kept) if kept.prepared => (kept, true),
            // The claim is new, or the program exited while it was preparing the claim. In the latter case, the claim
            // can be planned again, because its allocation has not changed.
            _ => (self.plan(claim).await?, false),
        };
        if !known {
            kept.prepared = false;
            store.put(&claim.uid, kept.clone()).map_err(said)?;
        }
        if let Err(what) = self.make(&claim.uid, &kept).await {
            if !known {
                // If a share cannot be removed, keep the claim in the store, so that the kubelet can unprepare it.
                match self.unmake(&claim.uid, &kept).await {
                    Ok(()) => store.forget(&claim.uid).map_err(said)?,
                    Err(more) => return Err(format!("{what}; the cleanup also failed: {more}")),
                }
            }
            return Err(what);
        }
        if !known {
            kept.prepared = true;
            store.put(&claim.uid, kept.clone()).map_err(said)?;
        }
        Ok((kept, !known))
    }

    /// Plans a claim's shares according to its allocation.
    async fn plan(&self, claim: &Named) -> Result<KeptClaim, String> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.kube.clone(), &claim.namespace);
        let found = tokio::time::timeout(KUBE, claims.get_opt(&claim.name)).await;
        let found = found.map_err(|_| format!("the API server did not respond within {} s", KUBE.as_secs()))?;
        let found = found.map_err(|error| format!("the API server did not return the claim: {error}"))?;
        let found = found.ok_or("the API server has no such claim")?;
        let uid = found.metadata.uid.as_deref().unwrap_or_default();
        if uid != claim.uid {
            return Err(format!("the API server has another claim of that name, with UID {uid}"));
        }
        let status = found.status.unwrap_or_default();
        let allocation =
            status.allocation.and_then(|allocation| allocation.devices).ok_or("the claim is not allocated")?;
        let sets = allocation.config.unwrap_or_default();
        let results: Vec<_> = allocation.results.unwrap_or_default();
        let ours: Vec<_> =
            results.iter().filter(|result| result.driver == DRIVER && result.pool == self.settings.node).collect();
        if ours.is_empty() {
            return Err(format!(
                "the claim has no allocation from driver `{DRIVER}` and pool `{}`",
                self.settings.node
            ));
        }
        if ours.len() > MAX_SHARES {
            return Err(format!("{} shares, expected at most {MAX_SHARES} in a claim", ours.len()));
        }
        let reserved = status.reserved_for.unwrap_or_default();
        let pods = reserved.into_iter().filter(|user| user.resource == "pods").map(|user| user.name).collect();
        let who = Claim { namespace: &claim.namespace, name: &claim.name, uid: &claim.uid, pods };
        let offers = self.offers.borrow().clone();
        let mut shares = Vec::new();
        let given = ours.into_iter().map(|result| Ok((result, offer(&offers, result)?)));
        for (number, group) in share::grouped(given.collect::<Result<_, String>>()?)?.iter().enumerate() {
            let [(result, _), others @ ..] = group.as_slice() else { continue };
            let applied = applied(&sets, &result.request)?;
            let body = share::body(&who, number, group, &applied, &self.settings.sockets)?;
            let other = |(result, _): &share::Given<'_>| KeptDevice {
                device: result.device.clone(),
                share_id: result.share_id.clone(),
            };
            shares.push(KeptShare {
                body,
                request: result.request.clone(),
                pool: result.pool.clone(),
                device: result.device.clone(),
                share_id: result.share_id.clone(),
                others: others.iter().map(other).collect(),
            });
        }
        Ok(KeptClaim { namespace: claim.namespace.clone(), name: claim.name.clone(), prepared: false, shares })
    }

    /// Creates the missing shares of a claim, and writes its CDI file.
    async fn make(&self, uid: &str, kept: &KeptClaim) -> Result<(), String> {
        for share in &kept.shares {
            self.folder().map_err(|error| format!("the folder for the sockets cannot be created: {error}"))?;
            self.ask(uid, &share.body).await?;
        }
        let file = CdiFile::new(&self.settings.cdi, uid).map_err(said)?;
        let mut pipes = BTreeMap::new();
        for share in &kept.shares {
            pipes.extend(self.pipes(&share.body).await?.map(|path| (share.body.name().to_owned(), path)));
        }
        let devices = self.devices(uid, kept, &pipes)?;
        if file.read().is_none_or(|spec| spec.devices != devices) {
            file.write(devices).map_err(said)?;
        }
        Ok(())
    }

    /// Returns the owner of the tenant or virtual machine with a share's name.
    async fn there(&self, uid: &str, body: &Body) -> Result<There, String> {
        let path = format!("{}/{}", body.collection(), segment(body.name()));
        match self.admin.get::<serde_json::Value>(&path).await {
            // The object may be on any card, because operators can move VMs and drain cards.
            Ok(there) if there["labels"]["claim_uid"] == uid => Ok(There::Ours),
            Ok(_) => Ok(There::Others),
            Err(error) if is_gone(&error) => Ok(There::Nothing),
            Err(error) => Err(told(&error)),
        }
    }

    /// Requests a share from the daemon if the share does not exist.
    async fn ask(&self, uid: &str, body: &Body) -> Result<(), String> {
        match self.there(uid, body).await? {
            There::Nothing => {}
            There::Ours => return Ok(()),
            There::Others => return Err(format!("`{}` exists but belongs to another owner; remove it", body.name())),
        }
        let made = match body {
            Body::Tenant(spec) => self.admin.post::<serde_json::Value>(body.collection(), spec).await,
            Body::Vm(spec) => self.admin.post(body.collection(), spec).await,
        };
        made.map(drop).map_err(|error| told(&error))
    }

    /// Creates the parent folder of the share folders, readable only by the daemon's user. The daemon creates the share
    /// folders. This program has more privileges than the daemon, so it must not follow paths that the daemon may have
    /// replaced.
    fn folder(&self) -> io::Result<()> {
        sockets::folder(&self.settings.sockets, &self.settings.admin, 0o700)
    }

    /// Returns the CDI devices of a claim.
    fn devices(&self, uid: &str, kept: &KeptClaim, pipes: &BTreeMap<String, PathBuf>) -> Result<Vec<Device>, String> {
        let mut places = BTreeMap::<String, usize>::new();
        let one = |(number, share): (usize, &KeptShare)| {
            let place = place(&mut places, &share.request);
            let mps = pipes.get(share.body.name()).map(PathBuf::as_path);
            let mut edits = self.edits(&share.body, &place, mps)?;
            // Two claims of a container may have requests with the same name, so also mount the folder at a path with
            // the claim's name.
            let socket = self.settings.sockets.join(share.body.name());
            edits.mounts.extend(by_claim(&kept.name, &place).map(|folder| Mount::read_only(&socket, &folder)));
            Ok(Device { name: device(uid, number), container_edits: edits })
        };
        kept.shares.iter().enumerate().map(one).collect()
    }

    /// Returns the pipe folder of the MPS server in a share's group, if the group has such a server.
    async fn pipes(&self, body: &Body) -> Result<Option<PathBuf>, String> {
        let Body::Tenant(spec) = body else { return Ok(None) };
        if spec.share_group.is_empty() {
            return Ok(None);
        }
        let path = format!("{}/{}", body.collection(), segment(body.name()));
        let tenant = self.admin.get::<api::Tenant>(&path).await.map_err(|error| told(&error))?;
        Ok(tenant.group_state.and_then(|state| state.mps_pipes))
    }

    fn edits(&self, body: &Body, place: &str, mps: Option<&Path>) -> Result<Edits, String> {
        let Settings { sockets, library, driver_library, .. } = &self.settings;
        match body {
            Body::Tenant(spec) => {
                let (all, driver) = (spec.socket_paths(sockets), driver_library.as_deref());
                let socket = spec.socket_path(sockets);
                Cuda { tenant: &spec.name, socket: &socket, sockets: &all, library, driver, place, mps }.edits()
            }
            Body::Vm(spec) => Vgpu { socket: &share::socket(sockets, &spec.name, false), place }.edits(),
        }
        .map_err(said)
    }

    /// Creates the response to the kubelet for a prepared claim. The first device of a tenant with several cards has
    /// the tenant's CDI device. The tenant's other devices have none, because a container needs the CDI device only
    /// once.
    fn prepared(&self, uid: &str, kept: &KeptClaim) -> Vec<Prepared> {
        let all = |(number, share): (usize, &KeptShare)| {
            let mut cdi = vec![cdi_spec::qualified(&device(uid, number))];
            if matches!(share.body, Body::Tenant(_)) {
                // Insert the operator's devices before this driver's devices, so that this driver's devices take
                // precedence.
                cdi.splice(..0, self.settings.beside.iter().cloned());
            }
            let others = share.others.iter().map(|other| (other.device.clone(), Vec::new()));
            let devices = std::iter::once((share.device.clone(), cdi)).chain(others);
            let (request, pool) = (share.request.clone(), share.pool.clone());
            let one = |(device, cdi)| Prepared { request: request.clone(), pool: pool.clone(), device, cdi };
            devices.map(one).collect::<Vec<_>>()
        };
        kept.shares.iter().enumerate().flat_map(all).collect()
    }

    /// Removes all shares of a claim. Succeeds if the claim has no shares.
    ///
    /// # Errors
    /// Returns an error if a share cannot be removed. The kubelet then retries.
    pub async fn unprepare(&self, claim: &Named) -> Result<(), String> {
        claim.check()?;
        let mut store = self.store.lock().await;
        let done = match store.get(&claim.uid).cloned() {
            Some(kept) => match self.unmake(&claim.uid, &kept).await {
                Ok(()) => store.forget(&claim.uid).map_err(said).map(|()| true),
                Err(what) => Err(what),
            },
            None => CdiFile::new(&self.settings.cdi, &claim.uid)
                .and_then(|file| file.remove())
                .map_err(said)
                .map(|()| false),
        };
        self.metrics.unprepared(done.is_ok());
        self.metrics.claims(store.claims());
        match &done {
            Ok(true) => {
                tracing::info!(%claim, "unprepared");
                self.events.tell(Event::removed(claim));
            }
            Ok(false) => {}
            Err(what) => tracing::warn!(%claim, what, "not unprepared"),
        }
        done.map(drop)
    }

    async fn unmake(&self, uid: &str, kept: &KeptClaim) -> Result<(), String> {
        // Remove the CDI file first. Otherwise, a container could get a share that is being removed.
        CdiFile::new(&self.settings.cdi, uid).and_then(|file| file.remove()).map_err(said)?;
        for share in &kept.shares {
            // Keep an object with this name but a different owner.
            if self.there(uid, &share.body).await? == There::Ours {
                let path = format!("{}/{}", share.body.collection(), segment(share.body.name()));
                self.admin
                    .delete(&path)
                    .await
                    .or_else(|error| if is_gone(&error) { Ok(()) } else { Err(told(&error)) })?;
            }
            // The share's folder must be removed even if the daemon has lost the share.
            let name = share.body.name();
            sockets::remove_folder(&self.settings.sockets, name, &share.body.cards())
                .map_err(|error| format!("the folder of `{name}` is not removed: {error}"))?;
        }
        Ok(())
    }

    /// Recreates shares of prepared claims that a restarted daemon has lost. The new shares have the same paths in the
    /// containers.
    pub async fn mend(&self) {
        // If the daemon does not respond, it is unknown whether it has lost shares. Another task reports that the
        // daemon is unreachable.
        let answers = self.offers.borrow().iter().any(|offer| offer.trouble != Some(Trouble::Unreachable));
        let Some(store) = answers.then(|| self.store.try_lock().ok()).flatten() else { return };
        let whole = store.claims().iter().filter(|(_, kept)| kept.prepared);
        for (uid, kept) in whole {
            if let Err(what) = self.make(uid, kept).await {
                tracing::warn!(claim = kept.name, namespace = kept.namespace, what, "the share of a claim is missing");
            }
        }
    }
}

fn said(error: impl std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn pods(labels: &api::Labels) -> Option<String> {
    labels.iter().find(|(key, _)| *key == "pod").map(|(_, pods)| pods.to_owned())
}

/// Returns the offer of an allocated device, or an error if new claims cannot use its card.
fn offer<'a>(offers: &'a [Offer], result: &DeviceRequestAllocationResult) -> Result<&'a Offer, String> {
    let offer = offers.iter().find(|offer| offer.device == result.device);
    let offer =
        offer.ok_or_else(|| format!("request `{}`: this node has no device `{}`", result.request, result.device))?;
    match &offer.trouble {
        None => Ok(offer),
        Some(_) => {
            let why = offer.why.as_deref().unwrap_or_default();
            Err(format!("request `{}`: card `{}` cannot be used: {why}", result.request, offer.card))
        }
    }
}

/// Returns the name of a CDI device.
fn device(uid: &str, number: usize) -> String {
    format!("{uid}-{number}")
}

/// Returns a share's folder inside a container, below a folder named after the claim. Returns `None` if the claim's
/// name is not valid in a path.
fn by_claim(claim: &str, place: &str) -> Option<PathBuf> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    let named = claim.bytes().all(good) && claim.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    named.then(|| Path::new(cdi_spec::SOCKETS).join("claims").join(claim).join(place))
}

/// Returns the name of a share's folder inside a container: the request's name, followed by a number for each share
/// after the first.
fn place(places: &mut BTreeMap<String, usize>, request: &str) -> String {
    let main = request.split('/').next().unwrap_or(request);
    let name: String = main.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(63).collect();
    let count = places.entry(name.clone()).or_default();
    *count += 1;
    if *count == 1 { name } else { format!("{name}-{count}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_lead_nowhere_else() {
        let check = |uid: &str| Named { namespace: "a".to_owned(), name: "b".to_owned(), uid: uid.to_owned() }.check();
        assert_eq!(check("5d307ca9-b3ef-428c-8861-06e72d69f223"), Ok(()));
        for bad in ["", "-", "../x", "a/b", "a b", "a\0", "-a", "a-", "ä", &"a".repeat(49)] {
            assert!(check(bad).unwrap_err().contains("is not a UID"), "{bad:?}");
        }
    }

    #[test]
    fn shares_of_a_request_have_places_of_their_own() {
        let mut places = BTreeMap::new();
        let found: Vec<_> = ["gpu", "gpu", "big/one", "a_/x"].iter().map(|name| place(&mut places, name)).collect();
        assert_eq!(found, ["gpu", "gpu-2", "big", "a"]);
    }
    #[test]
    fn claims_lead_nowhere_else() {
        let folder = |claim: &str| by_claim(claim, "gpu").map(|path| path.display().to_string());
        assert_eq!(folder("train.a-7x"), Some("/run/gpu-mediator/claims/train.a-7x/gpu".to_owned()));
        for bad in ["", ".", "..", "a/b", "/", "a b", "a\0"] {
            assert_eq!(folder(bad), None, "{bad:?}");
        }
    }
}
