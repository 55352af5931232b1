"""Every interface between the engine and an adapter. Each contract is in its docstring."""

from penstock.ports.broker import (
    Broker,
    Capabilities,
    Delivery,
    Out,
    Published,
    QueueAudit,
    Stats,
    Subscription,
    TopicSpec,
)
from penstock.ports.claims import Holder
from penstock.ports.clock import Clock
from penstock.ports.events import Accepted, Admitted, Baseline, End, PageMeta, Status
from penstock.ports.extraction import Extracted, Extraction, FetchedPage
from penstock.ports.fetching import (
    Cancellable,
    DirectFetcher,
    Done,
    Fetcher,
    Hop,
    PageFetcher,
    Response,
)
from penstock.ports.hosts import Exempt, Pace, ProxyHealth, RobotsCache
from penstock.ports.pages import PageStore
from penstock.ports.sink import FileSink, Reopen, Row, Sink, TableSink
from penstock.ports.source import (
    Batch,
    Finding,
    ServedSource,
    SlotInfo,
    Slotted,
    Source,
    SourceBooks,
    SourceState,
)
from penstock.ports.store import Store, StoreFacts

__all__ = [
    "Accepted",
    "Admitted",
    "Baseline",
    "Batch",
    "Broker",
    "Cancellable",
    "Capabilities",
    "Clock",
    "Delivery",
    "DirectFetcher",
    "Done",
    "End",
    "Exempt",
    "Extracted",
    "Extraction",
    "FetchedPage",
    "Fetcher",
    "FileSink",
    "Finding",
    "Holder",
    "Hop",
    "Out",
    "Pace",
    "PageFetcher",
    "PageMeta",
    "PageStore",
    "ProxyHealth",
    "Published",
    "QueueAudit",
    "Reopen",
    "Response",
    "RobotsCache",
    "Row",
    "ServedSource",
    "Sink",
    "SlotInfo",
    "Slotted",
    "Source",
    "SourceBooks",
    "SourceState",
    "Stats",
    "Status",
    "Store",
    "StoreFacts",
    "Subscription",
    "TableSink",
    "TopicSpec",
]
