//! The plugin's interface to the kubelet: the registration, preparation and health services, on two sockets.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fleet_grpc::dra::v1::{
    self, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use fleet_grpc::dra::v1beta1;
use fleet_grpc::health;
use fleet_grpc::health::v1alpha1::{
    DeviceHealth, DeviceIdentifier, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use fleet_grpc::pluginregistration::registration_server::Registration;
use fleet_grpc::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, async_trait};

use crate::DRIVER;
use crate::claim::Named;
use crate::device::Offer;
use crate::driver::Driver;
use crate::metrics::Metrics;
use crate::slices;

/// Names of the driver's services in the registration. The kubelet selects a version that it supports.
const SERVICES: [&str; 5] = [
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1beta1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
];
/// Maximum number of claims in one request.
const MAX_CLAIMS: usize = 256;
/// Interval between two reports of unchanged health. After 30 s without a report, the kubelet considers the health
/// unknown.
const REPORT: Duration = Duration::from_secs(10);

/// Returns the folder of the driver's own socket and state, which is below the kubelet's root.
#[must_use]
pub fn folder(root: &Path) -> PathBuf {
    root.join("plugins").join(DRIVER)
}

/// Returns the path of the socket through which the kubelet finds the driver.
#[must_use]
pub fn registration(root: &Path) -> PathBuf {
    root.join("plugins_registry").join(format!("{DRIVER}-reg.sock"))
}

/// The registration service.
#[derive(Debug)]
pub struct Registrar {
    /// The driver's own socket.
    pub endpoint: PathBuf,
    /// Metrics that record the registration.
    pub metrics: Arc<Metrics>,
}

#[async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: SERVICES.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.metrics.registered(plugin_registered);
        match plugin_registered {
            true => tracing::info!("the kubelet has registered the driver"),
            false => tracing::error!(error, "the kubelet rejected the registration of the driver"),
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The preparation and health services.
#[derive(Clone)]
pub struct Plugin {
    driver: Arc<Driver>,
    offers: watch::Receiver<Vec<Offer>>,
    node: String,
}

fn named(claim: v1::Claim) -> Named {
    let v1::Claim { namespace, uid, name } = claim;
    Named { namespace, name, uid }
}

fn bounded(claims: &[v1::Claim]) -> Result<(), Status> {
    if claims.len() > MAX_CLAIMS {
        return Err(Status::invalid_argument(format!("{} claims, expected at most {MAX_CLAIMS}", claims.len())));
    }
    Ok(())
}

impl Plugin {
    /// Creates the services for the driver of a node.
    #[must_use]
    pub fn new(driver: Arc<Driver>, offers: watch::Receiver<Vec<Offer>>, node: &str) -> Self {
        Self { driver, offers, node: node.to_owned() }
    }

    /// Completes an operation even if the kubelet stops waiting, because an incomplete operation would require a
    /// cleanup.
    async fn whole<T: Send + 'static>(change: impl Future<Output = T> + Send + 'static) -> Result<T, Status> {
        tokio::spawn(change).await.map_err(|error| Status::internal(format!("internal error: {error}")))
    }

    async fn prepare(&self, request: NodePrepareResourcesRequest) -> Result<NodePrepareResourcesResponse, Status> {
        bounded(&request.claims)?;
        let driver = Arc::clone(&self.driver);
        Self::whole(async move {
            let mut answer = NodePrepareResourcesResponse::default();
            for claim in request.claims {
                let claim = named(claim);
                let answered = match driver.prepare(&claim).await {
                    Ok(prepared) => {
                        let device = |one: crate::driver::Prepared| v1::Device {
                            request_names: vec![one.request],
                            pool_name: one.pool,
                            device_name: one.device,
                            cdi_device_ids: one.cdi,
                        };
                        let devices = prepared.into_iter().map(device).collect();
                        NodePrepareResourceResponse { devices, error: String::new() }
                    }
                    Err(error) => NodePrepareResourceResponse { devices: Vec::new(), error },
                };
                answer.claims.insert(claim.uid, answered);
            }
            answer
        })
        .await
    }

    async fn unprepare(
        &self,
        request: NodeUnprepareResourcesRequest,
    ) -> Result<NodeUnprepareResourcesResponse, Status> {
        bounded(&request.claims)?;
        let driver = Arc::clone(&self.driver);
        Self::whole(async move {
            let mut answer = NodeUnprepareResourcesResponse::default();
            for claim in request.claims {
                let claim = named(claim);
                let error = driver.unprepare(&claim).await.err().unwrap_or_default();
                answer.claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
            }
            answer
        })
        .await
    }

    fn health(&self) -> NodeWatchResourcesResponse {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let one = |offer: &Offer| {
            let (health, message) = slices::health(offer);
            let device = DeviceIdentifier { pool_name: self.node.clone(), device_name: offer.device.clone() };
            DeviceHealth {
                device: Some(device),
                health: health.into(),
                last_updated_time: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
                health_check_timeout_seconds: 0,
                message: message.chars().take(256).collect(),
            }
        };
        NodeWatchResourcesResponse { devices: self.offers.borrow().iter().map(one).collect() }
    }

    fn watch(&self) -> HealthStream {
        let (sender, receiver) = mpsc::channel(1);
        let (plugin, mut offers) = (self.clone(), self.offers.clone());
        tokio::spawn(async move {
            loop {
                offers.mark_unchanged();
                if sender.send(Ok(plugin.health())).await.is_err() {
                    return;
                }
                tokio::select! {
                    changed = offers.changed() => if changed.is_err() { return },
                    () = tokio::time::sleep(REPORT) => {}
                    () = sender.closed() => return,
                }
            }
        });
        ReceiverStream::new(receiver)
    }
}

type HealthStream = ReceiverStream<Result<NodeWatchResourcesResponse, Status>>;

/// Implements both versions of the preparation service, which have the same messages.
macro_rules! dra {
    ($($version:ident),*) => {$(
        #[async_trait]
        impl $version::dra_plugin_server::DraPlugin for Plugin {
            async fn node_prepare_resources(
                &self,
                request: Request<NodePrepareResourcesRequest>,
            ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
                self.prepare(request.into_inner()).await.map(Response::new)
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<NodeUnprepareResourcesRequest>,
            ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
                self.unprepare(request.into_inner()).await.map(Response::new)
            }
        }
    )*};
}

dra!(v1, v1beta1);

/// Implements all three versions of the health service, which have the same messages.
macro_rules! health {
    ($($version:ident),*) => {$(
        #[async_trait]
        impl health::$version::dra_resource_health_server::DraResourceHealth for Plugin {
            type NodeWatchResourcesStream = HealthStream;

            async fn node_watch_resources(
                &self,
                _: Request<NodeWatchResourcesRequest>,
            ) -> Result<Response<HealthStream>, Status> {
                Ok(Response::new(self.watch()))
            }
        }
    )*};
}

health!(v1alpha1, v1beta1, v1);
