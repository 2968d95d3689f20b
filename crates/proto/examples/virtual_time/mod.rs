//! The networks and hosts of the packet tests, for the examples.

#[path = "../../tests/packet/beside.rs"]
pub mod beside;
#[path = "../../tests/packet/cubic.rs"]
pub mod cubic;
#[path = "../../tests/packet/dark.rs"]
pub mod dark;
#[path = "../../tests/packet/fabrics.rs"]
pub mod fabrics;
#[path = "../../tests/packet/host.rs"]
pub mod host;
#[path = "../../tests/packet/incast.rs"]
pub mod incast;
#[path = "../../tests/packet/model.rs"]
pub mod model;
#[path = "../../tests/packet/random.rs"]
pub mod random;
#[path = "../../tests/packet/scenario.rs"]
pub mod scenario;
