"""Tables and the larger statements of the PostgreSQL broker.

Locks: `REQUEUE_DUE` and `LEASE` run concurrently with all other transactions. They take only rows
that are not locked, so they never wait. All other statements change the queue under the store's one
lock for the fleet. They may wait for `REQUEUE_DUE` or `LEASE`, which wait for no lock. So there are
no deadlocks. The row of a key in `keyq` represents the key's messages: a transaction that delivers
them locks that row.

Plans: a queue may be empty when the server collects its statistics, and full soon after. So no plan
may depend on row counts. Rows are found one by one from the given list, with LATERAL and ON
CONFLICT. OFFSET 0 and FOR UPDATE keep the planner from reordering the joins. `state+0` hides a
condition from indexes that are for other queries. Locked rows are updated by `ctid`, which does not
change while they are locked. A row version that is newer than the statement is skipped. Only
`REQUEUE_DUE` and `LEASE` can meet one.
"""

from __future__ import annotations

# Deleted rows slow down the search for the first row. So a queue is vacuumed after a fixed number
# of deletions, not after a share of its size.
_VACUUM = (
    "WITH (autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000, "
    "autovacuum_analyze_scale_factor=0, autovacuum_analyze_threshold=5000"
)

SCHEMA = f"""
CREATE TABLE topic(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, ordered BOOLEAN
    NOT NULL, max_depth INTEGER, retention REAL NOT NULL,
  paused TEXT, letters INTEGER NOT NULL DEFAULT 0);
CREATE TABLE grp(id INTEGER PRIMARY KEY AUTOINCREMENT, topic INTEGER NOT NULL, name TEXT NOT NULL,
    UNIQUE(topic, name));
CREATE SEQUENCE message_seq;
CREATE SEQUENCE lease_token;
CREATE TABLE message(seq INTEGER PRIMARY KEY, topic INTEGER NOT NULL, id TEXT NOT NULL, key TEXT
    NOT NULL, prio INTEGER NOT NULL, headers TEXT,
  body BLOB NOT NULL, at REAL NOT NULL);
CREATE INDEX message_topic ON message(topic, seq);
CREATE TABLE queue(grp INTEGER NOT NULL, seq INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT
    NULL, state INTEGER NOT NULL, at REAL NOT NULL DEFAULT 0,
  owner TEXT, token INTEGER NOT NULL DEFAULT 0, deliveries INTEGER NOT NULL DEFAULT 0, PRIMARY
      KEY(grp, seq)) {_VACUUM}, fillfactor=70);
CREATE INDEX queue_ready ON queue(grp, prio, key, seq) WHERE state=0;
CREATE INDEX queue_leased ON queue(grp, at) WHERE state=1;
CREATE INDEX queue_delayed ON queue(grp, at) WHERE state=2;
CREATE TABLE keyq(grp INTEGER NOT NULL, prio INTEGER NOT NULL, key TEXT NOT NULL, ready INTEGER NOT
    NULL, leased INTEGER NOT NULL, delayed INTEGER NOT NULL,
  next_at REAL NOT NULL, PRIMARY KEY(grp, prio, key)) {_VACUUM}, fillfactor=50);
CREATE INDEX keyq_next ON keyq(grp, prio, next_at) WHERE ready>0;
"""

# ?1 topics, ?2 ids, ?3 keys, ?4 classes, ?5 headers, ?6 bodies, ?7 due, ?8 now. The sequence
# numbers are assigned in the order of the batch.
PUBLISH = """WITH i AS MATERIALIZED (
    SELECT nextval('message_seq') AS seq, s.* FROM (
      SELECT * FROM unnest(?1::bigint[], ?2::text[], ?3::text[], ?4::bigint[], ?5::text[],
          ?6::bytea[], ?7::float8[])
        WITH ORDINALITY AS u(topic, id, key, prio, headers, body, due, ord) ORDER BY ord) s),
  m AS (INSERT INTO message(seq, topic, id, key, prio, headers, body, at)
      SELECT seq, topic, id, key, prio, headers, body, ?8::float8 FROM i),
  q AS (INSERT INTO queue(grp, seq, prio, key, state, at)
    SELECT g.id, i.seq, CASE WHEN t.ordered THEN 1 ELSE i.prio END, i.key, CASE WHEN i.due>?8 THEN
        2 ELSE 0 END, CASE WHEN i.due>?8 THEN i.due ELSE 0 END
    FROM i JOIN topic t ON t.id=i.topic JOIN grp g ON g.topic=i.topic
        RETURNING grp, prio, key, state),
  k AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
    SELECT grp, prio, key, count(*) FILTER (WHERE state=0), 0, count(*) FILTER (WHERE state=2), ?8
        FROM q GROUP BY grp, prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE
        SET ready=keyq.ready+excluded.ready, delayed=keyq.delayed+excluded.delayed)
SELECT seq FROM i ORDER BY ord"""

# ?1 group, ?2 now. Returns whether the topic is paused, and whether a delay or lease has ended.
OUTLOOK = """SELECT t.paused IS NOT NULL,
  EXISTS(SELECT 1 FROM queue WHERE grp=?1 AND state=1 AND at<=?2) OR EXISTS(SELECT 1 FROM queue
      WHERE grp=?1 AND state=2 AND at<=?2)
FROM grp g JOIN topic t ON t.id=g.topic WHERE g.id=?1"""

# ?1 group, ?2 now. Returns when the next lease, delay or hold ends.
NEXT = """SELECT least((SELECT at FROM queue WHERE grp=?1 AND state=1 AND at>?2 ORDER BY at
    LIMIT 1),
    (SELECT at FROM queue WHERE grp=?1 AND state=2 AND at>?2 ORDER BY at LIMIT 1),
    (SELECT next_at FROM keyq WHERE grp=?1 AND prio=0 AND ready>0 AND next_at>?2 ORDER BY next_at
        LIMIT 1),
    (SELECT next_at FROM keyq WHERE grp=?1 AND prio=1 AND ready>0 AND next_at>?2 ORDER BY next_at
        LIMIT 1),
    (SELECT next_at FROM keyq WHERE grp=?1 AND prio=2 AND ready>0 AND next_at>?2 ORDER BY next_at
        LIMIT 1))"""

# ?1 group, ?2 now, ?3 keys per class. Returns the longest-waiting keys with their ready counts.
KEYS = """(SELECT prio, key, ready FROM keyq WHERE grp=?1 AND prio=0 AND ready>0 AND next_at<=?2
    ORDER BY next_at LIMIT ?3)
UNION ALL (SELECT prio, key, ready FROM keyq WHERE grp=?1 AND prio=1 AND ready>0 AND next_at<=?2
    ORDER BY next_at LIMIT ?3)
UNION ALL (SELECT prio, key, ready FROM keyq WHERE grp=?1 AND prio=2 AND ready>0 AND next_at<=?2
    ORDER BY next_at LIMIT ?3)"""

# ?1 group, ?2 now, ?3 ordered. Makes messages ready whose delay ended or whose lease expired. An
# ordered key is unlocked only for a message that was delivered. A message that was only delayed
# must not unlock the key: another message of that key may be leased.
REQUEUE_DUE = """WITH d AS MATERIALIZED (
    (SELECT seq, prio, key FROM queue WHERE grp=?1 AND state=2 AND at<=?2 ORDER BY at LIMIT 1000)
    UNION ALL (SELECT seq, prio, key FROM queue WHERE grp=?1 AND state=1 AND at<=?2 ORDER BY at
        LIMIT 1000)),
  q AS MATERIALIZED (SELECT x.* FROM d
    CROSS JOIN LATERAL (SELECT 1 FROM keyq WHERE grp=?1 AND prio=d.prio AND key=d.key
        FOR UPDATE SKIP LOCKED) k
    CROSS JOIN LATERAL (SELECT ctid AS place, state FROM queue WHERE grp=?1 AND seq=d.seq
        AND state+0<>0 AND at<=?2 FOR UPDATE SKIP LOCKED) x),
  l AS (UPDATE queue SET state=0, at=0, owner=NULL, token=0 WHERE ctid=ANY(ARRAY(SELECT place
      FROM q WHERE state=1)) RETURNING prio, key, deliveries),
  w AS (UPDATE queue SET state=0, at=0, owner=NULL, token=0 WHERE ctid=ANY(ARRAY(SELECT place
      FROM q WHERE state=2)) RETURNING prio, key, deliveries),
  b AS (SELECT prio, key, deliveries, 1 AS state FROM l UNION ALL SELECT prio, key, deliveries, 2
      FROM w),
  u AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
    SELECT ?1, prio, key, count(*), -count(*) FILTER (WHERE state=1), -count(*) FILTER (WHERE
        state=2),
      CASE WHEN ?3::boolean AND bool_or(deliveries>0) THEN ?2 ELSE -1.0 END FROM b
          GROUP BY prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE
        SET ready=keyq.ready+excluded.ready, leased=keyq.leased+excluded.leased,
            delayed=keyq.delayed+excluded.delayed,
      next_at=CASE WHEN excluded.next_at<0 THEN keyq.next_at ELSE excluded.next_at END)
SELECT count(*) FROM b"""

# ?1 group, ?2 now, ?3 classes, ?4 keys, ?5 messages of each key, ?6 end of the lease, ?7 owner, ?8
# new `next_at` of these keys. Since `KEYS` ran, another process may have leased or released
# messages. So the state is checked again under the key's lock: an updated row must still be ready.
LEASE = """WITH t AS MATERIALIZED (SELECT nextval('lease_token') AS token),
  k AS MATERIALIZED (SELECT q.prio, q.key, w.n FROM unnest(?3::bigint[], ?4::text[], ?5::bigint[])
      AS w(prio, key, n) CROSS JOIN LATERAL
    (SELECT prio, key FROM keyq WHERE grp=?1 AND prio=w.prio AND key=w.key AND ready+0>0
        AND next_at+0<=?2 FOR UPDATE SKIP LOCKED) q),
  p AS MATERIALIZED (SELECT s.place FROM k CROSS JOIN LATERAL
    (SELECT ctid AS place FROM queue WHERE grp=?1 AND prio=k.prio AND key=k.key AND state=0
        ORDER BY seq LIMIT k.n FOR UPDATE SKIP LOCKED) s),
  l AS (UPDATE queue SET state=1, at=?6, owner=?7, token=(SELECT token
      FROM t), deliveries=deliveries+1
    WHERE ctid=ANY(ARRAY(SELECT place FROM p)) RETURNING seq, prio, key, deliveries, token),
  u AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
      SELECT ?1, prio, key, -count(*), count(*), 0, ?8 FROM l GROUP BY prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE
        SET ready=keyq.ready+excluded.ready, leased=keyq.leased+excluded.leased,
            next_at=excluded.next_at)
SELECT l.seq, l.key, m.id, m.headers, m.body, l.deliveries, l.token, m.prio FROM l
  CROSS JOIN LATERAL (SELECT id, headers, body, prio FROM message WHERE seq=l.seq OFFSET 0) m
      ORDER BY l.seq"""

# ?1 group, ?2 positions, ?3 tokens, ?4 actions (0 delete, 1 delay, 2 make ready), ?5 due times,
# ?6 now, ?7 ordered.
SETTLE = """WITH x AS MATERIALIZED (SELECT q.*, i.act, i.due
    FROM unnest(?2::bigint[], ?3::bigint[], ?4::bigint[], ?5::float8[]) AS i(seq, token, act, due)
        CROSS JOIN LATERAL
    (SELECT ctid AS place, seq, prio, key FROM queue WHERE grp=?1 AND seq=i.seq AND token=i.token
        AND state+0=1 FOR UPDATE) q),
  d AS (DELETE FROM queue WHERE ctid=ANY(ARRAY(SELECT place FROM x WHERE act=0))),
  p AS (UPDATE queue SET state=2, at=(SELECT due FROM x WHERE x.seq=queue.seq), owner=NULL, token=0
    WHERE ctid=ANY(ARRAY(SELECT place FROM x WHERE act=1))),
  r AS (UPDATE queue SET state=0, at=0, owner=NULL, token=0, deliveries=deliveries-1
      WHERE ctid=ANY(ARRAY(SELECT place FROM x WHERE act=2))),
  u AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
    SELECT ?1, prio, key, count(*) FILTER (WHERE act=2), -count(*), count(*) FILTER (WHERE act=1),
      CASE WHEN ?7::boolean AND bool_or(act<>1) THEN ?6::float8 ELSE -1.0 END FROM x
          GROUP BY prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE
        SET ready=keyq.ready+excluded.ready, leased=keyq.leased+excluded.leased,
            delayed=keyq.delayed+excluded.delayed,
      next_at=CASE WHEN excluded.next_at<0 THEN keyq.next_at ELSE excluded.next_at END)
SELECT seq FROM x"""

# ?1 group, ?2 positions, ?3 tokens, ?4 until.
EXTEND = """WITH x AS MATERIALIZED (SELECT q.place, q.seq, i.token
    FROM unnest(?2::bigint[], ?3::bigint[]) AS i(seq, token) CROSS JOIN LATERAL
    (SELECT ctid AS place, seq FROM queue WHERE grp=?1 AND seq=i.seq AND token=i.token
        AND state+0=1 FOR UPDATE) q),
  u AS (UPDATE queue SET at=?4 WHERE ctid=ANY(ARRAY(SELECT place FROM x)))
SELECT seq, token FROM x"""

# ?1 groups, ?2 positions, ?3 tokens. Returns those that are leased under their token.
HELD = """SELECT i.grp, i.seq, i.token FROM unnest(?1::bigint[], ?2::bigint[], ?3::bigint[]) AS
    i(grp, seq, token) CROSS JOIN LATERAL
  (SELECT 1 FROM queue WHERE grp=i.grp AND seq=i.seq AND token=i.token AND state+0=1 OFFSET 0) q"""

# ?1 group, ?2 owner, ?3 now, ?4 ordered. Ends the owner's leases. Returns the message ids.
RECLAIM = """WITH b AS (UPDATE queue SET state=0, at=0, owner=NULL, token=0 WHERE grp=?1
    AND state=1 AND owner=?2 RETURNING seq, prio, key),
  u AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
    SELECT ?1, prio, key, count(*), -count(*), 0, CASE WHEN ?4::boolean THEN ?3::float8 ELSE -1.0
        END FROM b GROUP BY prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE
        SET ready=keyq.ready+excluded.ready, leased=keyq.leased+excluded.leased,
      next_at=CASE WHEN excluded.next_at<0 THEN keyq.next_at ELSE excluded.next_at END)
SELECT m.id FROM b CROSS JOIN LATERAL (SELECT id FROM message WHERE seq=b.seq OFFSET 0) m
    ORDER BY b.seq"""

# ?1 group, ?2 topic, ?3 since, ?4 ordered, ?5 now. Queues messages that the group has settled.
REPLAY = """WITH q AS (INSERT INTO queue(grp, seq, prio, key, state)
    SELECT ?1, m.seq, CASE WHEN ?4::boolean THEN 1 ELSE m.prio END, m.key, 0 FROM message m
    WHERE m.topic=?2 AND m.at>=?3 AND NOT EXISTS(SELECT 1 FROM queue q WHERE q.grp=?1
        AND q.seq=m.seq) RETURNING prio, key),
  k AS (INSERT INTO keyq(grp, prio, key, ready, leased, delayed, next_at)
      SELECT ?1, prio, key, count(*), 0, 0, ?5 FROM q GROUP BY prio, key
    ON CONFLICT(grp, prio, key) DO UPDATE SET ready=keyq.ready+excluded.ready)
SELECT count(*) FROM q"""

# ?1 now, ?2 lower position (exclusive), ?3 upper position (inclusive). Deletes messages older than
# the retention that all groups have settled.
PRUNE = """WITH gone AS (DELETE FROM message m USING topic t WHERE t.id=m.topic AND m.seq>?2
    AND m.seq<=?3 AND m.at<?1-t.retention
    AND NOT EXISTS(SELECT 1 FROM grp g JOIN queue q ON q.grp=g.id AND q.seq=m.seq
        WHERE g.topic=m.topic OFFSET 0) RETURNING m.topic),
  l AS (UPDATE topic SET letters=greatest(0, topic.letters-c.n) FROM (SELECT topic, count(*) AS n
      FROM gone GROUP BY topic) c WHERE topic.id=c.topic)
SELECT count(*) FROM gone"""

SUMS = (
    "coalesce(sum(k.ready), 0)::bigint, coalesce(sum(k.leased), 0)::bigint, "
    "coalesce(sum(k.delayed), 0)::bigint"
)
