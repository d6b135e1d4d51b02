//! Publishes the node's cards to the cluster as one ResourceSlice, and updates the slice when the daemon's cards
//! change.

use std::sync::Arc;
use std::time::Duration;

use admin_client::{Admin, AskError};
use api::{CardList, MemoryList, SchedulerList};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, ListParams, PostParams, WatchParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::StreamExt;

use crate::DRIVER;
use crate::device::{Offer, Trouble};
use crate::metrics::Metrics;

/// Time limit of a request to the API server.
const API_TIMEOUT: Duration = Duration::from_secs(15);
/// Delay after a failure before the next attempt.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Duration of a watch of the slices, in seconds.
const WATCH_SECONDS: u32 = 240;
/// Maximum delay until a change to the cluster's slices is detected if the watch does not report it.
const RESYNC_INTERVAL: Duration = Duration::from_secs(300);

/// Polls the daemon, and sends changes to `offers`.
pub async fn follow(admin: Admin, every: Duration, offers: watch::Sender<Vec<Offer>>, metrics: Arc<Metrics>) {
    let mut tick = interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let found = look(&admin).await;
        metrics.daemon(found.is_ok());
        let found = found.unwrap_or_else(|error| {
            tracing::debug!(%error, "the daemon does not respond");
            offers.borrow().iter().cloned().map(Offer::unreachable).collect()
        });
        offers.send_if_modified(|now| {
            let news = *now != found;
            if news {
                tracing::info!(
                    cards = found.len(),
                    usable = found.iter().filter(|o| o.trouble.is_none()).count(),
                    "cards"
                );
                *now = found;
            }
            news
        });
    }
}

async fn look(admin: &Admin) -> Result<Vec<Offer>, AskError> {
    let cards: CardList = admin.get("/v1/cards").await?;
    // The reports about memory and the scheduler may omit a failed card, but the list of cards includes it.
    let memories = admin.get::<MemoryList>("/v1/memory").await.map(|list| list.memories).unwrap_or_default();
    let schedulers = admin.get::<SchedulerList>("/v1/schedulers").await.map(|list| list.schedulers).unwrap_or_default();
    Ok(Offer::all(&cards.cards, &memories, &schedulers))
}

/// Publishes the slice of a node.
pub struct Publisher {
    kube: Client,
    node: String,
    metrics: Arc<Metrics>,
    /// UID of the node. The node owns the slice, so that the slice is deleted with the node.
    owner: Option<String>,
    /// The devices that were last written.
    written: Option<Vec<Device>>,
    /// The slice that the API server returned for the last write. The server omits fields of disabled features.
    kept: Option<ResourceSliceSpec>,
    /// Set if the API server stores taints. Otherwise, unusable cards are omitted from the slice.
    taints: bool,
    generation: i64,
}

impl Publisher {
    /// Creates the publisher of the slice of `node`.
    #[must_use]
    pub fn new(kube: Client, node: &str, metrics: Arc<Metrics>) -> Self {
        let node = node.to_owned();
        Self { kube, node, metrics, owner: None, written: None, kept: None, taints: true, generation: 0 }
    }

    fn slices(&self) -> Api<ResourceSlice> {
        Api::all(self.kube.clone())
    }

    fn name(&self) -> String {
        format!("{}-{DRIVER}", self.node)
    }

    fn selector(&self) -> String {
        format!("spec.nodeName={},spec.driver={DRIVER}", self.node)
    }

    /// Keeps the slice up to date with `offers`. Never returns.
    pub async fn run(mut self, mut offers: watch::Receiver<Vec<Offer>>) {
        loop {
            let wanted = offers.borrow_and_update().clone();
            // The daemon's cards are not known yet. Keep the slice from an earlier run, because it may be correct.
            if wanted.is_empty() && self.written.is_none() {
                let _ = offers.changed().await;
                continue;
            }
            match self.publish(&wanted).await {
                Ok(version) => {
                    tokio::select! {
                        _ = offers.changed() => {}
                        () = self.changed(&version) => {}
                        () = sleep(RESYNC_INTERVAL) => {}
                    }
                }
                Err(what) => {
                    tracing::warn!(what, "the slice cannot be published");
                    sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    /// Waits until another client changes the node's slices, as a starting kubelet does, or until the watch ends.
    async fn changed(&self, version: &str) {
        let slices = self.slices();
        let params = WatchParams::default().fields(&self.selector()).timeout(WATCH_SECONDS);
        match slices.watch(&params, version).await {
            Ok(events) => {
                let mut events = std::pin::pin!(events);
                if events.next().await.is_none() {
                    // The watch has ended. Wait before the next watch, in case every watch ends immediately.
                    sleep(RETRY_DELAY).await;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the slices cannot be watched");
                sleep(RETRY_DELAY).await;
            }
        }
    }

    /// Publishes a slice with `offers`. Returns the resource version at which to start a watch.
    async fn publish(&mut self, offers: &[Offer]) -> Result<String, String> {
        match timeout(API_TIMEOUT, self.publish_once(offers)).await {
            Ok(done) => done.map_err(|error| error.to_string()),
            Err(_) => Err(format!("the API server did not respond within {} s", API_TIMEOUT.as_secs())),
        }
    }

    async fn publish_once(&mut self, offers: &[Offer]) -> Result<String, kube::Error> {
        let slices = self.slices();
        let list = slices.list(&ListParams::default().fields(&self.selector())).await?;
        let version = list.metadata.resource_version.clone().unwrap_or_default();
        let (ours, others): (Vec<_>, Vec<_>) =
            list.items.into_iter().partition(|s| s.metadata.name == Some(self.name()));
        for other in others {
            let name = other.metadata.name.unwrap_or_default();
            tracing::info!(name, "deleting a slice of another version for this node");
            slices.delete(&name, &DeleteParams::default()).await?;
        }
        let there = ours.into_iter().next();
        let mut devices = self.devices(offers);
        let same = there.as_ref().is_some_and(|there| Some(&there.spec) == self.kept.as_ref());
        if same && self.written.as_ref() == Some(&devices) {
            return Ok(version);
        }
        let mut kept = self.write(there, devices.clone()).await?;
        if lost_taints(&devices, &kept.spec) {
            tracing::warn!("the cluster does not support device taints: unusable cards are omitted");
            self.taints = false;
            devices = self.devices(offers);
            kept = self.write(Some(kept), devices.clone()).await?;
        }
        // Start the watch at the version that was just written. Otherwise, the watch would report this write as a
        // change.
        let version = kept.metadata.resource_version.clone().unwrap_or(version);
        (self.written, self.kept) = (Some(devices), Some(kept.spec));
        Ok(version)
    }

    /// Returns the devices for the offers. Omits unusable devices if the API server does not store taints.
    fn devices(&self, offers: &[Offer]) -> Vec<Device> {
        let shown = offers.iter().filter(|offer| self.taints || offer.trouble.is_none());
        shown.map(Offer::device).collect()
    }

    /// Writes the slice. Returns the slice as stored by the API server.
    async fn write(
        &mut self,
        there: Option<ResourceSlice>,
        devices: Vec<Device>,
    ) -> Result<ResourceSlice, kube::Error> {
        let slices = self.slices();
        let last = there.as_ref().map_or(self.generation, |there| there.spec.pool.generation.max(self.generation));
        let generation = last.saturating_add(1);
        let pool = ResourcePool { generation, name: self.node.clone(), resource_slice_count: 1 };
        let spec = ResourceSliceSpec {
            devices: Some(devices),
            driver: DRIVER.to_owned(),
            node_name: Some(self.node.clone()),
            pool,
            ..ResourceSliceSpec::default()
        };
        let mut metadata = ObjectMeta { name: Some(self.name()), ..ObjectMeta::default() };
        metadata.owner_references = Some(vec![self.owner().await?]);
        metadata.resource_version = there.as_ref().and_then(|there| there.metadata.resource_version.clone());
        let slice = ResourceSlice { metadata, spec };
        let kept = match there {
            Some(_) => slices.replace(&self.name(), &PostParams::default(), &slice).await?,
            None => slices.create(&PostParams::default(), &slice).await?,
        };
        self.generation = generation;
        self.metrics.generation(generation);
        tracing::info!(generation, devices = slice.spec.devices.map_or(0, |devices| devices.len()), "slice published");
        Ok(kept)
    }

    async fn owner(&mut self) -> Result<OwnerReference, kube::Error> {
        let uid = match &self.owner {
            Some(uid) => uid.clone(),
            None => {
                let nodes: Api<Node> = Api::all(self.kube.clone());
                let uid = nodes.get(&self.node).await?.metadata.uid.unwrap_or_default();
                self.owner.insert(uid).clone()
            }
        };
        let (api_version, kind) = ("v1".to_owned(), "Node".to_owned());
        Ok(OwnerReference {
            api_version,
            kind,
            name: self.node.clone(),
            uid,
            controller: Some(true),
            block_owner_deletion: None,
        })
    }
}

/// Returns true if the API server has dropped the taints of devices.
fn lost_taints(devices: &[Device], kept: &ResourceSliceSpec) -> bool {
    let tainted =
        |devices: &[Device]| devices.iter().any(|device| device.taints.as_ref().is_some_and(|t| !t.is_empty()));
    tainted(devices) && !tainted(kept.devices.as_deref().unwrap_or_default())
}

/// Returns the health of a device for the kubelet. The health is unknown if the daemon does not respond.
#[must_use]
pub fn health(offer: &Offer) -> (fleet_grpc::health::v1alpha1::HealthStatus, String) {
    use fleet_grpc::health::v1alpha1::HealthStatus;
    let why = offer.why.clone().unwrap_or_default();
    match offer.trouble {
        Some(Trouble::Failed) => (HealthStatus::Unhealthy, why),
        Some(Trouble::Unreachable) => (HealthStatus::Unknown, why),
        Some(Trouble::Passthrough | Trouble::Drained) | None => (HealthStatus::Healthy, why),
    }
}
