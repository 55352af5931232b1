"""The tables and the larger statements of the PostgreSQL broker, each with the order in which it takes its locks. Nothing is run here.

Who locks what: whoever hands out (`BRING_BACK`, `LEASE`) runs beside everybody else, takes only what nobody holds, and so never waits.
All others change the queue under the store's one lock for the fleet. They may wait for one who hands out, who waits for nobody: no two ever
wait for each other. The row of a key in `keyq` stands for the key's messages: who hands them out holds it.
"""

from __future__ import annotations

READY, LEASED, DELAYED = 0, 1, 2
ONE_CLASS = 1  # ordered topics have one: a class of its own would let a key overtake itself
NEVER = 1e18  # an ordered key while one of its events is out

# Deleted rows are in the way of whoever looks for the first one: a queue is cleaned by count, not by a share of its size.
_TIDY = "WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000, autovacuum_analyze_scale_factor=0, autovacuum_analyze_threshold=5000"

SCHEMA = f"""
CREATE TABLE topic(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, ordered BOOLEAN NOT NULL, max_depth INTEGER, retention REAL NOT NULL,
  paused TEXT, letters INTEGER NOT NULL DEFAULT 0);
CREATE TABLE grp(id INTEGER PRIMARY KEY AUTOINCREMENT, topic INTEGER NOT NULL, name TEXT NOT NULL, UNIQUE(topic, name));
CREATE SEQUENCE message_seq;
CREATE SEQUENCE lease_token;
CREATE TABLE message(seq INTEGER PRIMARY KEY, topic INTEGER NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, prio INTEGER NOT NULL, headers TEXT,
  body BLOB NOT NULL, at REAL NOT NULL);
CREATE INDEX message_topic ON message(topic, seq);
CREATE TABLE queue(grp INTEGER NOT NULL, seq INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT NULL, state INTEGER NOT NULL, at REAL NOT NULL DEFAULT 0,
  owner TEXT, token INTEGER NOT NULL DEFAULT 0, deliveries INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(grp, seq)) {_TIDY}, fillfactor=70);
CREATE INDEX queue_ready ON queue(grp, prio, key, seq) WHERE state=0;
CREATE INDEX queue_leased ON queue(grp, at) WHERE state=1;
CREATE INDEX queue_delayed ON queue(grp, at) WHERE state=2;
CREATE TABLE keyq(grp INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT NULL, ready INTEGER NOT NULL, leased INTEGER NOT NULL, delayed INTEGER NOT NULL,
  next_at REAL NOT NULL, PRIMARY KEY(grp, prio, key)) {_TIDY}, fillfactor=50);
CREATE INDEX keyq_next ON keyq(grp, prio, next_at) WHERE ready>0;
"""

# ?1 topics, ?2 ids, ?3 keys, ?4 classes, ?5 headers, ?6 bodies, ?7 due, ?8 now. The numbers are drawn in the order of the batch.
PLACE = """WITH i AS MATERIALIZED (
    SELECT nextval('message_seq') AS seq, s.* FROM (
      SELECT * FROM unnest(?1::bigint[], ?2::text[], ?3::text[], ?4::bigint[], ?5::text[], ?6::bytea[], ?7::float8[])
        WITH ORDINALITY AS u(topic, id, key, prio, headers, body, due, ord) ORDER BY ord) s),
  m AS (INSERT INTO message(seq, topic, id, key, prio, headers, body, at) SELECT seq, topic, id, key, prio, headers, body, ?8::float8 FROM i),
  q AS (INSERT INTO queue(grp, seq, prio, key, state, at)
    SELECT g.id, i.seq, CASE WHEN t.ordered THEN 1 ELSE i.prio END, i.key, CASE WHEN i.due>?8 THEN 2 ELSE 0 END, CASE WHEN i.due>?8 THEN i.due ELSE 0 END
    FROM i JOIN topic t ON t.id=i.topic JOIN grp g ON g.topic=i.topic RETURNING grp, prio, key, state),
  k AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
    SELECT grp, prio, key, count(*) FILTER (WHERE state=0), 0, count(*) FILTER (WHERE state=2), ?8 FROM q GROUP BY grp, prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE SET ready=keyq.ready+excluded.ready, delayed=keyq.delayed+excluded.delayed)
SELECT seq FROM i ORDER BY ord"""

# ?1 group, ?2 now: is anything due to come back, and when is something next?
OUTLOOK = """SELECT t.paused IS NOT NULL,
  EXISTS(SELECT 1 FROM queue WHERE grp=?1 AND state=1 AND at<=?2) OR EXISTS(SELECT 1 FROM queue WHERE grp=?1 AND state=2 AND at<=?2),
  least((SELECT at FROM queue WHERE grp=?1 AND state=1 AND at>?2 ORDER BY at LIMIT 1),
    (SELECT at FROM queue WHERE grp=?1 AND state=2 AND at>?2 ORDER BY at LIMIT 1),
    (SELECT next_at FROM keyq WHERE grp=?1 AND prio=0 AND ready>0 AND next_at>?2 ORDER BY next_at LIMIT 1),
    (SELECT next_at FROM keyq WHERE grp=?1 AND prio=1 AND ready>0 AND next_at>?2 ORDER BY next_at LIMIT 1),
    (SELECT next_at FROM keyq WHERE grp=?1 AND prio=2 AND ready>0 AND next_at>?2 ORDER BY next_at LIMIT 1))
FROM grp g JOIN topic t ON t.id=g.topic WHERE g.id=?1"""

# ?1 group, ?2 now, ?3 how many of each class: those that waited longest, with what they have.
KEYS = """(SELECT prio, key, ready FROM keyq WHERE grp=?1 AND prio=0 AND ready>0 AND next_at<=?2 ORDER BY next_at LIMIT ?3)
UNION ALL (SELECT prio, key, ready FROM keyq WHERE grp=?1 AND prio=1 AND ready>0 AND next_at<=?2 ORDER BY next_at LIMIT ?3)
UNION ALL (SELECT prio, key, ready FROM keyq WHERE grp=?1 AND prio=2 AND ready>0 AND next_at<=?2 ORDER BY next_at LIMIT ?3)"""

# ?1 group, ?2 now, ?3 ordered: delays that ended and leases that ran out. An ordered key is free again only by what was handed out: a message
# that merely waited for its time must not set free a key of which another is out.
BRING_BACK = """WITH d AS MATERIALIZED (
    (SELECT seq, prio, key FROM queue WHERE grp=?1 AND state=2 AND at<=?2 ORDER BY at LIMIT 1000)
    UNION ALL (SELECT seq, prio, key FROM queue WHERE grp=?1 AND state=1 AND at<=?2 ORDER BY at LIMIT 1000)),
  k AS MATERIALIZED (SELECT prio, key FROM keyq WHERE grp=?1 AND (prio, key) IN (SELECT prio, key FROM d) FOR UPDATE SKIP LOCKED),
  q AS MATERIALIZED (SELECT q.seq, q.state FROM queue q JOIN d ON d.seq=q.seq JOIN k ON k.prio=d.prio AND k.key=d.key
    WHERE q.grp=?1 AND q.state<>0 AND q.at<=?2 FOR UPDATE OF q SKIP LOCKED),
  b AS (UPDATE queue SET state=0, at=0, owner=NULL, token=0 FROM q WHERE queue.grp=?1 AND queue.seq=q.seq
    RETURNING queue.prio, queue.key, q.state AS was, queue.deliveries),
  c AS (SELECT prio, key, count(*) AS n, count(*) FILTER (WHERE was=1) AS leased, count(*) FILTER (WHERE was=2) AS delayed, bool_or(deliveries>0) AS out
    FROM b GROUP BY prio, key),
  u AS (UPDATE keyq SET ready=keyq.ready+c.n, leased=keyq.leased-c.leased, delayed=keyq.delayed-c.delayed,
      next_at=CASE WHEN ?3::boolean AND c.out THEN ?2 ELSE keyq.next_at END
    FROM c WHERE keyq.grp=?1 AND keyq.prio=c.prio AND keyq.key=c.key)
SELECT count(*) FROM b"""

# ?1 group, ?2 now, ?3 classes, ?4 keys, ?5 how many of each, ?6 lease ends, ?7 owner, ?8 when these keys are asked next. What another took or
# released since the keys were read is looked at again under the key's lock: the row that is changed must still be ready.
LEASE = """WITH t AS MATERIALIZED (SELECT nextval('lease_token') AS token),
  w AS (SELECT * FROM unnest(?3::bigint[], ?4::text[], ?5::bigint[]) AS u(prio, key, n)),
  k AS MATERIALIZED (SELECT q.prio, q.key, w.n FROM keyq q JOIN w ON w.prio=q.prio AND w.key=q.key
    WHERE q.grp=?1 AND q.ready>0 AND q.next_at<=?2 FOR UPDATE OF q SKIP LOCKED),
  p AS MATERIALIZED (SELECT s.seq FROM k CROSS JOIN LATERAL
    (SELECT seq FROM queue WHERE grp=?1 AND prio=k.prio AND key=k.key AND state=0 ORDER BY seq LIMIT k.n) s),
  l AS (UPDATE queue q SET state=1, at=?6, owner=?7, token=t.token, deliveries=q.deliveries+1 FROM p, t WHERE q.grp=?1 AND q.seq=p.seq AND q.state=0
    RETURNING q.seq, q.prio, q.key, q.deliveries, q.token),
  u AS (UPDATE keyq q SET ready=q.ready-c.n, leased=q.leased+c.n, next_at=?8
    FROM (SELECT prio, key, count(*) AS n FROM l GROUP BY prio, key) c WHERE q.grp=?1 AND q.prio=c.prio AND q.key=c.key)
SELECT l.seq, l.key, m.id, m.headers, m.body, l.deliveries, l.token, m.prio FROM l JOIN message m ON m.seq=l.seq ORDER BY l.seq"""

# ?1 groups, ?2 positions, ?3 tokens, ?4 what is to be done (0 gone, 1 delayed, 2 ready again), ?5 when, ?6 now.
SETTLE = """WITH i AS MATERIALIZED (SELECT * FROM unnest(?1::bigint[], ?2::bigint[], ?3::bigint[], ?4::bigint[], ?5::float8[]) AS u(grp, seq, token, act, due)),
  d AS (DELETE FROM queue q USING i WHERE i.act=0 AND q.grp=i.grp AND q.seq=i.seq AND q.token=i.token AND q.state=1 RETURNING q.grp, q.seq, q.prio, q.key),
  p AS (UPDATE queue q SET state=CASE WHEN i.act=1 THEN 2 ELSE 0 END, at=i.due, owner=NULL, token=0, deliveries=q.deliveries-CASE WHEN i.act=2 THEN 1 ELSE 0 END
    FROM i WHERE i.act<>0 AND q.grp=i.grp AND q.seq=i.seq AND q.token=i.token AND q.state=1 RETURNING q.grp, q.seq, q.prio, q.key, i.act),
  a AS (SELECT grp, seq, prio, key, 0 AS act FROM d UNION ALL SELECT grp, seq, prio, key, act FROM p),
  c AS (SELECT grp, prio, key, count(*) AS n, count(*) FILTER (WHERE act=1) AS delayed, count(*) FILTER (WHERE act=2) AS ready FROM a GROUP BY grp, prio, key),
  u AS (UPDATE keyq SET leased=keyq.leased-c.n, delayed=keyq.delayed+c.delayed, ready=keyq.ready+c.ready,
      next_at=CASE WHEN t.ordered AND c.n>c.delayed THEN ?6 ELSE keyq.next_at END
    FROM c JOIN grp g ON g.id=c.grp JOIN topic t ON t.id=g.topic WHERE keyq.grp=c.grp AND keyq.prio=c.prio AND keyq.key=c.key)
SELECT grp, seq FROM a"""

# ?1 owner, ?2 now: its leases end.
RECLAIM = """WITH b AS (UPDATE queue SET state=0, at=0, owner=NULL, token=0 WHERE grp IN (SELECT id FROM grp) AND state=1 AND owner=?1
    RETURNING grp, seq, prio, key),
  c AS (SELECT grp, prio, key, count(*) AS n FROM b GROUP BY grp, prio, key),
  u AS (UPDATE keyq SET ready=keyq.ready+c.n, leased=keyq.leased-c.n, next_at=CASE WHEN t.ordered THEN ?2 ELSE keyq.next_at END
    FROM c JOIN grp g ON g.id=c.grp JOIN topic t ON t.id=g.topic WHERE keyq.grp=c.grp AND keyq.prio=c.prio AND keyq.key=c.key)
SELECT m.id FROM b JOIN message m ON m.seq=b.seq ORDER BY b.seq"""

# ?1 group, ?2 topic, ?3 since, ?4 ordered, ?5 now: what the group does not have any more.
REPLAY = """WITH q AS (INSERT INTO queue(grp, seq, prio, key, state)
    SELECT ?1, m.seq, CASE WHEN ?4::boolean THEN 1 ELSE m.prio END, m.key, 0 FROM message m
    WHERE m.topic=?2 AND m.at>=?3 AND NOT EXISTS(SELECT 1 FROM queue q WHERE q.grp=?1 AND q.seq=m.seq) RETURNING prio, key),
  k AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at) SELECT ?1, prio, key, count(*), 0, 0, ?5 FROM q GROUP BY prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE SET ready=keyq.ready+excluded.ready)
SELECT count(*) FROM q"""

# ?1 now, ?2 behind this number, ?3 up to that one: history that every group has settled and retention has passed.
PRUNE = """WITH gone AS (DELETE FROM message m USING topic t WHERE t.id=m.topic AND m.seq>?2 AND m.seq<=?3 AND m.at<?1-t.retention
    AND NOT EXISTS(SELECT 1 FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=m.seq WHERE g.topic=m.topic) RETURNING m.topic),
  l AS (UPDATE topic SET letters=greatest(0, topic.letters-c.n) FROM (SELECT topic, count(*) AS n FROM gone GROUP BY topic) c WHERE topic.id=c.topic)
SELECT count(*) FROM gone"""

SUMS = "coalesce(sum(k.ready), 0)::bigint, coalesce(sum(k.leased), 0)::bigint, coalesce(sum(k.delayed), 0)::bigint"
